"""The model file: its fields, its graph without the weights, and questions that it answers."""
