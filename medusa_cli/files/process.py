"""The process that runs this code: the program's own, or that of a caller of the Python API."""

# True in the `medusa` program and the processes that it starts. Only there may limits of the process change.
owned = False
