"""What the command line calls: measuring, checking and explaining sharded programs."""
