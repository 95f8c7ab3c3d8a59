"""Parts for policies: facts of a job, the schedule they decide on, options, points, capabilities. Knows no policy and
no pass."""
