"""Lower bounds: seconds that no schedule of a job goes below, and the certificate that a plan carries of one."""
