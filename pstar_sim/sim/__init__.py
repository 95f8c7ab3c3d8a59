"""Plays any plan on a modelled machine: `play(plan) -> Timeline`. Knows steps, bytes and seconds, and no policy."""

from pstar_sim.sim.play import play

__all__ = ["play"]
