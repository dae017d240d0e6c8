"""What a training step would be on accelerators that are not there.

plan      the question and its answer, as a table; compare, over several choices
meshes    the same step on several meshes, and what each layer sends on each
child     names of accelerators; the process that compiles for them, and what it reads of the step
"""
