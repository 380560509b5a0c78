"""A plan is plain data: degrees, options, and per axis a table from module pattern to style name."""

from dtensor_5d.plan.check import built_violations, rule_violations
from dtensor_5d.plan.patterns import matches
from dtensor_5d.plan.plan import Plan

__all__ = ["Plan", "built_violations", "matches", "rule_violations"]
