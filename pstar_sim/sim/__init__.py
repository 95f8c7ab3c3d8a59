"""The simulator: `play(plan) -> Timeline` plays any plan on a modelled machine. The simulator knows steps, bytes and
seconds, and no policy."""

from pstar_sim.sim.play import play

__all__ = ["play"]
