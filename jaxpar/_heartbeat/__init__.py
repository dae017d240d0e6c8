"""Heartbeats between the processes of a run, and the report of a loss. No JAX here.

server  one for each run, in the launcher or in a thread of process 0; and the messages, which both ends check
client  one in each process: it ends the process after a loss, and tells the others how the process itself ends
"""
