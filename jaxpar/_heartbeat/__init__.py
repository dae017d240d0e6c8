"""Heartbeats between the processes of a run, and the report of a loss. No JAX here.

connection  the protocol: JSON messages over TCP, checked field by field, and the secret that both ends know
server      one for each run, in the launcher or in a thread of process 0
client      one in each process: it sends heartbeats, ends the process after a loss, and reports how it ends itself
proxy       hides the death of process 0 from jax's own client
"""
