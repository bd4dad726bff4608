"""The process that runs this code: the program's own, or one that calls the Python API."""

# True in the `medusa` program and in the processes that it starts. Only these processes may
# change their own limits, such as the limit of memory.
owned = False
