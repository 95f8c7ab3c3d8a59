"""The simulator: `play(plan) -> Timeline` plays any plan on a modelled machine."""

from pstar_sim.sim.play import play

__all__ = ["play"]
