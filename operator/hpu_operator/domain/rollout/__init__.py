"""From observed groups to what is done next. Pure."""
