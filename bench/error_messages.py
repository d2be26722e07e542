"""The messages of errors that are results of a measurement."""


def split_message(error: Exception) -> list[str]:
    """Return the lines of an error's message, or the name of its type if it has no message."""
    return str(error).strip().splitlines() or [type(error).__name__]
