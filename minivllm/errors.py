"""The errors that a user of the package can cause and can mend."""


class MinivllmError(Exception):
    """Base of every error below; its text is one sentence that says what to change."""


class RequestError(MinivllmError, ValueError):
    """A request or a setting that cannot be served. Nothing was queued or changed."""


class ModelError(MinivllmError, RuntimeError):
    """A model that cannot be found, fetched, read or stored."""


class CourseError(MinivllmError, RuntimeError):
    """A chapter, an exercise or a bug that is not there, or your own files used too late."""
