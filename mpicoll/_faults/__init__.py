"""No hang without a culprit: who is late, what each rank does, and how a job ends that can never end by itself."""
