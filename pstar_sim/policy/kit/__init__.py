"""Parts for policies, which know no policy and no pass: facts of a job, schedules, options, points, capabilities."""
