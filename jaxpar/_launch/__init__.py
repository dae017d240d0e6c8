"""`python -m jaxpar launch`: several processes on this machine. No JAX here.

command   the arguments
launcher  starts the processes, reads their output, ends them after a failure, starts them again
"""
