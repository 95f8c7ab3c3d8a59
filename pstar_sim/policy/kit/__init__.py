"""Parts for policies, which know no policy and no pass."""
