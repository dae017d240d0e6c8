"""Heartbeats between the processes of a run, and the report of a loss. No JAX here.

connection, messages, addresses    JSON messages over TCP, checked field by field
listener                       how many connections come in a second
secret                         what each end of a connection proves that it knows
server, server_thread, peer        one for each run, in the launcher or in a thread of process 0
elastic_server                 the same where processes may leave and join
client, exit                       one in each process: it sends heartbeats and ends the process after a loss
pulse, pulse_process           heartbeats of a process in which something holds Python's lock
thread                             of the above: one that fails says so, and what follows
proxy                              hides the death of process 0 from jax's own client
"""
