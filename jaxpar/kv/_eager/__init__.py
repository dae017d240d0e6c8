"""Pushes at the prompt, as compiled programs.

programs    over the devices that push
buckets     what one device packs
processes   over the devices of several processes
"""
