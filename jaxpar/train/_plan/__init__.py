"""What a training step would be on accelerators that are not there.

plan      the question and its answer, as a table; compare, over several choices
slices    names of slices and of GPUs, with what is known of each
child     the process that compiles, which has the compiler and no accelerator, and what it reads of the step
"""
