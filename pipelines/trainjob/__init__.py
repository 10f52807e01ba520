"""Training on several nodes: a Kubeflow TrainJob that runs a stage's own command under torchrun.

``spec`` writes it from a plan, ``launcher`` starts, follows and ends it from a pod of the pipeline.
"""
