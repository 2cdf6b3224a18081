"""Write a rewritten program as one runnable Python module, for people to read (`explanation.code()`)."""
