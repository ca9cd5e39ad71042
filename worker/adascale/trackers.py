"""Trackers of experiments, for `ElasticTrainer(tracker=...)`. AdaScale does not install their packages."""

from adascale_worker.reporting.trackers import MLflow, TensorBoard, Tracker, WeightsAndBiases

__all__ = ["MLflow", "TensorBoard", "Tracker", "WeightsAndBiases"]
