"""What a training step would be on accelerators that are not there.

plan          the question and its answer, as a table; compare, over several choices
meshes        the same step on several meshes, and what each layer sends on each
largest       the largest batch whose step fits
accelerators  what is known of each, by its name
child         the process that compiles for them
compiled      what it reads of the compiled step
"""
