// The Python bindings of native passes.

#include <pybind11/stl.h>
#include <torch/csrc/utils/pybind.h>

#include <array>
#include <deque>
#include <optional>
#include <string>
#include <vector>

#include "draws.h"
#include "experts.h"
#include "pages.h"
#include "pass.h"

namespace {

// Sets how many threads torch's own functions use when this thread calls them; calls from other
// threads keep theirs. Passes still want the previous number, which is returned, unless that is the
// number set.
int64_t limit_threads(int64_t count) {
  const int before = usual_threads ? usual_threads : at::get_num_threads();
#ifdef _OPENMP
  omp_set_num_threads(static_cast<int>(count));
  usual_threads = count == before ? 0 : before;
#endif
  return before;
}

struct Plan {
  std::deque<Sublayer> sublayers;  // another thread may add a head while a pass reads them

  int64_t add(Sublayer sublayer) {
    constexpr int64_t MOST = attention::SEGMENT;
    const int64_t sink = sublayer.sink;
    require(sink >= 0 && sink <= MOST && (sublayer.window > 0 || sink == 0), "a sink is of up to ",
            MOST, " slots, before a window; got ", sink);
    require(sublayer.kind != Kind::mlp ||
                (sublayer.output.has_value() == !sublayer.inputs.empty() &&
                 (sublayer.output || sublayer.mixture)),
            "an MLP has inputs and an output, or a mixture of experts");
    sublayers.push_back(std::move(sublayer));
    return static_cast<int64_t>(sublayers.size()) - 1;
  }

  Tensor run(const Tensor& hidden, const std::vector<int64_t>& which,
             const std::vector<Tensor>& keys, const std::vector<Tensor>& values,
             const std::vector<int64_t>& starts, const std::vector<Angles>& angles,
             const std::vector<int64_t>& bases, const std::optional<Tensor>& layer_inputs,
             const std::vector<int64_t>& branches) const {
    std::vector<const Sublayer*> chosen;
    for (int64_t index : which) chosen.push_back(&sublayers.at(index));
    if (chosen.empty()) return hidden;
    const pybind11::gil_scoped_release released;
    require(hidden.dim() == 3 && hidden.device().is_cpu(),
            "hidden states must be (rows, tokens, width) on the CPU, got ", hidden.sizes());
    const Cache cache{keys, values, Places(starts, hidden.size(1), branches), bases};
    const Tensor given = hidden.contiguous();
    std::optional<Tensor> further;
    if (layer_inputs) further = layer_inputs->contiguous();
    if (given.scalar_type() == at::kFloat)
      return Pass<float>(chosen, given, cache, angles, further).run();
    require(given.scalar_type() == at::kBFloat16, "hidden states must be float32 or bfloat16, got ",
            given.scalar_type());
    return Pass<BFloat16>(chosen, given, cache, angles, further).run();
  }
};

}  // namespace

namespace py = pybind11;

// Sets struct fields from keyword arguments of the same names and counts those it used.
class Fields {
 public:
  explicit Fields(const py::kwargs& given) : given_(given) {}

  template <typename T>
  Fields& operator()(const char* name, T& field) {
    if (given_.contains(name)) field = given_[name].cast<T>(), ++taken_;
    return *this;
  }
  void check() const {
    const std::string given = py::str(py::handle(given_));
    require(taken_ == given_.size(), "a keyword of ", given, " is unknown");
  }

 private:
  const py::kwargs& given_;
  size_t taken_ = 0;
};

PYBIND11_MODULE(TORCH_EXTENSION_NAME, module) {
  module.def("disturbed", [] { return crew.disturbed(); });
  module.def("limit_threads", &limit_threads);
  module.def("move_to_huge_pages", &move_to_huge_pages,
             py::call_guard<py::gil_scoped_release>());
  module.def("tiles_refusal", &tiles::refusal);
  module.def("arranged", &arranged, py::call_guard<py::gil_scoped_release>());
  module.def("unpacked", &unpacked, py::call_guard<py::gil_scoped_release>());
  module.def("drawn", &draws::drawn, py::call_guard<py::gil_scoped_release>(), py::arg("logits"),
             py::arg("temperature"), py::arg("top_k"), py::arg("top_p"), py::arg("least"),
             py::arg("starts") = std::vector<int64_t>{});
  py::class_<Matrix>(module, "Matrix")
      .def(py::init<Tensor, std::optional<Tensor>>(), py::arg("weight"), py::arg("bias"))
      .def(py::init(&stored_matrix), py::arg("bytes"), py::arg("bias"), py::kw_only(),
           py::arg("format"), py::arg("rows"), py::arg("columns"), py::arg("group") = 0,
           py::arg("order") = std::nullopt);
  py::class_<Norm>(module, "Norm")
      .def(py::init(&norm_of), py::arg("weight"), py::arg("epsilon"), py::arg("style"));
  py::class_<Activation>(module, "Activation")
      .def(py::init([](const std::string& kind, std::optional<Tensor> positive,
                       std::optional<Tensor> negative, double beta, double epsilon) {
        return Activation{named<Act>(std::array{"silu", "gelu", "relu2", "xielu"}, kind), positive,
                          negative, beta, epsilon};
      }), py::arg("kind"), py::arg("positive") = std::nullopt, py::arg("negative") = std::nullopt,
           py::arg("beta") = 0.0, py::arg("epsilon") = 0.0);
  py::class_<Tail>(module, "Tail").def(py::init([](const py::kwargs& given) {
    Tail tail;
    Fields{given}("gate", tail.gate)("projection", tail.projection)("norm", tail.norm)(
        "scalar", tail.scalar)("layer", tail.layer)("act", tail.act).check();
    require(tail.gate.has_value() == tail.projection.has_value(),
            "a tail has a gate and a projection, or neither");
    return tail;
  }));
  py::class_<Mixture>(module, "Mixture").def(py::init([](const py::kwargs& given) {
    Mixture mixture;
    Fields{given}("router", mixture.router)("wide", mixture.router.wide)("norm", mixture.norm)(
        "scale", mixture.scale)("number", mixture.number)("factors", mixture.factors)(
        "factor", mixture.factor)("sigmoid", mixture.sigmoid)("bias", mixture.bias)(
        "whole", mixture.whole)(
        "cast", mixture.cast)("expand", mixture.expand)("shrink", mixture.shrink)(
        "before", mixture.before)("after", mixture.after)("dense", mixture.dense)(
        "top", mixture.top)("act", mixture.act).check();
    require(mixture.norm.has_value() == mixture.scale.has_value(), "a router's norm has a scale");
    return mixture;
  }));
  py::class_<Angles>(module, "Angles")
      .def(py::init<Tensor, Tensor>(), py::arg("cos"), py::arg("sin"));
  py::class_<Plan>(module, "Plan")
      .def(py::init<>())
      .def("add", [](Plan& plan, const std::string& kind, const py::kwargs& given) {
        const std::array kinds{"attention", "mlp", "tail", "head", "layer_inputs"};
        Sublayer layer{named<Kind>(kinds, kind)};
        Fields{given}("before", layer.before)("after", layer.after)("q_norm", layer.q_norm)(
            "k_norm", layer.k_norm)("v_norm", layer.v_norm)("inputs", layer.inputs)(
            "output", layer.output)("tail", layer.tail)("mixture", layer.mixture)(
            "heads", layer.heads)("kv_heads", layer.kv_heads)("width", layer.width)(
            "window", layer.window)("sink", layer.sink)("angles", layer.angles)(
            "scale", layer.scale)("softcap", layer.softcap)("times", layer.times)(
            "divisor", layer.divisor)("eager", layer.eager)("act", layer.act)(
            "factor", layer.factor)("gate", layer.gate)("sinks", layer.sinks)(
            "query_factor", layer.query_factor)("pairs", layer.pairs)(
            "late_norms", layer.late_norms)("gated", layer.gated)("joined", layer.joined).check();
        return plan.add(std::move(layer));
      })
      .def("run", &Plan::run, py::arg("hidden"), py::arg("which"), py::arg("keys"),
           py::arg("values"), py::arg("starts"), py::arg("angles"),
           py::arg("bases") = std::vector<int64_t>{}, py::arg("layer_inputs") = std::nullopt,
           py::arg("branches") = std::vector<int64_t>{});
}
