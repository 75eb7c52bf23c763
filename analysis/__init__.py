"""Turns files of runs, searches and trainings into tables, plots and a report, without torch."""

from layerskip.analysis.report import write_report

__all__ = ["write_report"]
