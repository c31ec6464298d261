"""`ssm-tune doctor [MODEL]`: what is installed and really works, which path each operation takes, and what to do.

Nothing is believed: packages are imported, kernels are called, forward and backward, on the device that they are for,
and compared with the reference; a model's operations are run in its own sizes. Weights are not read.
"""

from ssm_tune.doctor.examination import examine, run_doctor
from ssm_tune.doctor.report import Advice, ModelReport, PackageReport, PathReport, Report

__all__ = ["Advice", "ModelReport", "PackageReport", "PathReport", "Report", "examine", "run_doctor"]
