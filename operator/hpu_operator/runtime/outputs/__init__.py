"""What is written: children, records, status, events and the log."""
