"""Every claim here runs in a process whose torch knows the far device."""

from tests.unit.device.foreign.far_device import register

register()
