"""`python -m jaxpar launch`: several processes on this machine. No JAX here.

command     the arguments
launcher    starts the processes, ends them after a failure, starts them again
deaths      how often a process of an elastic run may die
child       one process and its output
"""
