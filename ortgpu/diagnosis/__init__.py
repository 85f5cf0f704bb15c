"""Judgement: from facts to errors that have not been raised yet.

Importing this package imports none of its modules. Python gives half a module to one of two threads, if one imports a
package whose own code imports a module of it, and the other that module.
"""
