"""What each operator does: to axes (`rules/`), to numbers (`values/`), what it is linear in, what else is known of it."""
