"""Lower bounds: seconds below which no schedule of a job can be, and the certificate with which a plan carries its
bound."""
