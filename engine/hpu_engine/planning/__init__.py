"""Pure arithmetic: what a deployment costs before a card is taken. Standard library and pydantic only."""
