"""What a run's telemetry tells, as numbers and pictures.

    ROOT/telemetry/ ──read──> events on one axis ──digest──> Run ──draw──> scenes ──┬─> one HTML page
                                                                                    └─> PNGs
Invariant: whatever is cut, missing or of another version is noted in the report, and nothing else suffers.
Loads no torch.
"""

from __future__ import annotations
