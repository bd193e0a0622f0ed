"""What does communication add to a training step? Backend "mpi" beside Gloo, in turn on the same ranks.

    python -m mpicoll.run -n 2 -m benchmarks.steps --rows mlp fsdp

Before it is timed, the gradients of each implementation are compared with those of one process that sees all batches.

**Computation alone** is the same step with nothing communicated: on torch's fake process group, which returns at once, or with a
hook of DistributedDataParallel that leaves its buckets as they are. **Exposed communication** is the time of a step minus that of
computation alone in the same round: what communication adds to the step, in waiting and in time that it takes from computation.
Where ranks have no spare core, no implementation can add less than its copies take: the column "copies" is that floor.

    models.py ──► data_parallel.py, model_parallel.py ──► __main__.py, the rows and the table
                  step.py: what a step and a row are
"""
