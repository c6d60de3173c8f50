"""The demonstration: an unmodified 3-D U-Net from MONAI on a whole MRI volume, split over ranks.

Read in this order: `data` (the volume and how it is cut), `train` (model and training loop, the
same for one process and for many), `measure` (what a step costs), `worker` (what every rank runs),
`report` (table and picture), `launch` (one command that starts the ranks).
"""
