"""Programs that tests start, with arguments."""
