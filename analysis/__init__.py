"""Files of runs, searches and trainings to tables, plots and a report; never imports torch."""

from layerskip.analysis.report import write_report

__all__ = ["write_report"]
