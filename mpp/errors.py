"""The exceptions that end a run without being a defect."""


class UserError(Exception):
    """A fault in a recipe, a flag, a path or the data: what is wrong, where, and how to mend it.

    Entry points print it as one message and exit with status 2; every other exception is a defect.
    """


class ImageError(UserError):
    """A fault of one image, which one process of several may meet alone and has to report itself."""


class Stopped(Exception):
    """The run was asked to stop, saved its state, and can be continued."""
