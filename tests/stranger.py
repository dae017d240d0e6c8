"""Somebody with jax's own client who is no process of the run: it takes a number there, and writes what it likes.

Arguments: the address of jax's coordination service, how many processes there are, the number to take.
"""

import os
import sys

from jax.experimental import multihost_utils

address, processes, rank = sys.argv[1:]
state = type(multihost_utils.distributed.global_state)()
state.initialize_preemption_sync_manager = lambda: None
options = {"cluster_detection_method": "deactivate", "local_device_ids": []}
state.initialize(address, int(processes), int(rank), **options, heartbeat_timeout_seconds=1000)
KEYS = "ready/1 ready/abc ready/99 refused/x group program answers/16 failed/1/8/1/join failed/1/8/stranger".split()
for text in ("[", '{"a": 1}', "[[0, []]]", "-1", "[[0, -1]]", '"' + "9" * 5000, "x"):
    for key in KEYS:
        state.client.key_value_set(f"jaxpar/elastic/{key}", text, allow_overwrite=True)
os._exit(0)
