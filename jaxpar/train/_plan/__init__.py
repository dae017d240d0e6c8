"""What a training step would be on accelerators that are not there.

plan      the question and its answer; compare, over several choices
slices    names of slices and of GPUs, with what is known of each
child     the process that compiles, which has the compiler and no accelerator
examine   what that process reads of the compiled step
words     the answer as a table, and what to try
"""
