"""What a training step would be on accelerators that are not there.

plan      the question and its answer, as a table; compare, over several choices
child     names of accelerators; the process that compiles for them, and what it reads of the step
"""
