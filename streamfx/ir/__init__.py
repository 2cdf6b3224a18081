"""The small intermediate representation that all passes share."""
