"""`iso.planner.estimate`: a step, a machine and a plan in; a report out."""
