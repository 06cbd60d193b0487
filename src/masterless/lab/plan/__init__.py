"""Will it fit? Shapes of a model from its config or its file headers, and the bytes that training it takes."""

from masterless.lab.plan.parameters import Model, Parameter, PlanError, load_model, model_of_size
from masterless.lab.plan.table import Advice, Plan, Row, Settings, advise, make_plan

__all__ = [
    "Advice",
    "Model",
    "Parameter",
    "Plan",
    "PlanError",
    "Row",
    "Settings",
    "advise",
    "load_model",
    "make_plan",
    "model_of_size",
]
