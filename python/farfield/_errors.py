"""Exceptions of the package."""


class FarfieldError(RuntimeError):
    """Far memory could not do what was asked; the message says what to do."""


class NotSupportedError(FarfieldError):
    """This process or machine cannot have far memory. Nothing was changed."""


class ServerError(FarfieldError):
    """Far memory could not be reached, or does not let us in. Nothing was changed."""


class BudgetError(FarfieldError, ValueError):
    """The near budget is no size, or less than a process can run with."""


class ConflictError(FarfieldError):
    """Far memory is on already, with other arguments; the message says which."""


class QueryError(FarfieldError, ValueError):
    """A question to a frame cannot be answered: a column that is not there, types that do not fit."""


class NotEnabledError(FarfieldError):
    """Far memory is off in this process: `enable()` was not called."""


class JobEndedError(FarfieldError):
    """The keeper of the job is gone: nobody can change the budget or the pool any more."""


class FarfieldWarning(UserWarning):
    """Far memory is on, but not as asked for."""
