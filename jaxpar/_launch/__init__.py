"""`python -m jaxpar launch`: several processes on this machine. No JAX here.

command   the arguments
launcher  starts the processes, ends them after a failure, starts them again
child     one process and its output
"""
