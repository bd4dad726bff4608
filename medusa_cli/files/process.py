"""The process that runs this code: the program's own, or one that calls the Python API."""

# True in the `medusa` program and in the processes that it starts. Only these may change limits of their process.
owned = False
