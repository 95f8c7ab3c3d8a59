// SPDX-License-Identifier: Apache-2.0
// Scaled dot product attention: CUDA's two fused kernels, computed by their formulas. Shapes, strides and what is kept
// for backward are CUDA's: (batch, length, heads, width) in memory, and the logarithm of each row's sum.
#pragma once
#include <ATen/ATen.h>

#include <array>
#include <cmath>
#include <limits>

#include "aliases.h"
#include "random.h"
#include "tasks.h"

namespace emulated {

struct Attention {
  Tensor q, k, v, bias;
  double dropout;
  bool causal;
  double scale;
  uint64_t seed = 0;  // of dropout

  Attention on_the_cpu() const {
    Attention a = *this;
    for (Tensor* t : {&a.q, &a.k, &a.v, &a.bias}) *t = on_cpu(*t);
    return a;
  }
};

// Grouped queries: each head of keys and values serves several heads of queries.
inline Tensor repeated(const Tensor& x, int64_t heads) {
  return x.size(1) == heads ? x : x.repeat_interleave(heads / x.size(1), 1);
}
inline Tensor summed(const Tensor& x, int64_t heads) {
  return x.size(1) == heads ? x : x.unflatten(1, {heads, x.size(1) / heads}).sum(2);
}

inline Tensor scores(const Attention& a) {
  Tensor k = repeated(a.k, a.q.size(1)).to(at::kFloat);
  Tensor s = at::matmul(a.q.to(at::kFloat), k.transpose(-2, -1)) * a.scale;
  if (a.bias.defined()) s = s + a.bias.to(at::kFloat);
  if (!a.causal) return s;
  Tensor future = at::ones({a.q.size(-2), a.k.size(-2)}, at::kBool).tril().logical_not();
  return s.masked_fill(future, -std::numeric_limits<float>::infinity());
}

inline Tensor dropout_factors(const Tensor& weights, const Attention& a) {
  Tensor drawn = at::empty(weights.sizes(), at::kFloat).uniform_(0, 1, generator_of(a.seed));
  return drawn.ge(a.dropout).to(at::kFloat) / (1 - a.dropout);
}

inline void attend(const char* name, const Attention& attention, const Tensor& output, const Tensor& log_sums) {
  Attention a = attention.on_the_cpu();
  Tensor to = on_cpu(output), sums_to = on_cpu(log_sums);
  enqueue(name, [=]() mutable {
    Tensor s = scores(a), sums = s.logsumexp(-1);
    Tensor weights = (s - sums.unsqueeze(-1)).exp().nan_to_num(0.0);
    if (a.dropout > 0) weights = weights * dropout_factors(weights, a);
    to.copy_(at::matmul(weights, repeated(a.v, a.q.size(1)).to(at::kFloat)));
    if (!sums_to.numel()) return;
    sums_to.fill_(0);  // the efficient kernel's rows are padded
    sums_to.slice(2, 0, sums.size(2)).copy_(sums);
  });
}

struct AttentionGradients {
  Tensor q, k, v, bias;
};

inline void attend_backward(const char* name, const Attention& attention, const Tensor& gradient,
                            const Tensor& output, const Tensor& log_sums, const AttentionGradients& gradients) {
  Attention a = attention.on_the_cpu();
  Tensor g = on_cpu(gradient), o = on_cpu(output), sums = on_cpu(log_sums);
  Tensor to_q = on_cpu(gradients.q), to_k = on_cpu(gradients.k), to_v = on_cpu(gradients.v),
         to_bias = on_cpu(gradients.bias);
  enqueue(name, [=]() mutable {
    int64_t heads = a.q.size(1), fewer = a.k.size(1);
    Tensor from = g.to(at::kFloat);
    Tensor weights = (scores(a) - sums.slice(2, 0, a.q.size(2)).unsqueeze(-1)).exp().nan_to_num(0.0);
    Tensor factors = a.dropout > 0 ? dropout_factors(weights, a) : at::ones({}, at::kFloat);
    Tensor of_weights = at::matmul(from, repeated(a.v, heads).to(at::kFloat).transpose(-2, -1)) * factors;
    Tensor of_scores = weights * (of_weights - (from * o.to(at::kFloat)).sum(-1, true));
    to_v.copy_(summed(at::matmul((weights * factors).transpose(-2, -1), from), fewer));
    to_q.copy_(at::matmul(of_scores, repeated(a.k, heads).to(at::kFloat)) * a.scale);
    to_k.copy_(summed(at::matmul(of_scores.transpose(-2, -1), a.q.to(at::kFloat)), fewer) * a.scale);
    if (to_bias.defined()) to_bias.copy_(of_scores.sum_to_size(to_bias.sizes()));
  });
}

// -- the two operators and their backwards
inline Tensor empty_output(const Tensor& q, int64_t width) {
  return at::empty({q.size(0), q.size(2), q.size(1), width}, q.options()).transpose(1, 2);
}
inline Tensor empty_log_sums(const Tensor& q, int64_t rows) {
  return at::empty({q.size(0), q.size(1), rows}, q.options().dtype(at::kFloat));
}
inline double scale_of(const Tensor& q, std::optional<double> scale) {
  return scale ? *scale : 1.0 / std::sqrt((double)q.size(-1));
}
inline Tensor number(uint64_t value) { return at::scalar_tensor((int64_t)value, at::kLong); }
inline uint64_t seed_of(const Tensor& number, double dropout) {
  return dropout > 0 ? (uint64_t)number.item<int64_t>() : 0;
}
using Four = std::tuple<Tensor, Tensor, Tensor, Tensor>;

inline Four efficient_attention(const Tensor& q, const Tensor& k, const Tensor& v, const std::optional<Tensor>& bias,
                                bool with_log_sums, double dropout, bool causal, std::optional<double> scale) {
  Tensor output = empty_output(q, v.size(-1)), sums = empty_log_sums(q, with_log_sums ? (q.size(2) + 31) / 32 * 32 : 0);
  uint64_t seed = dropout > 0 ? next_seed() : 0;
  Attention a{q, k, v, bias.value_or(Tensor()), dropout, causal, scale_of(q, scale), seed};
  attend("aten::_scaled_dot_product_efficient_attention", a, output, sums);
  return {output, sums, number(seed), number(0)};
}

inline Four efficient_attention_backward(const Tensor& gradient, const Tensor& q, const Tensor& k, const Tensor& v,
                                         const Tensor& bias, const Tensor& output, const Tensor& sums,
                                         const Tensor& seed, const Tensor&, double dropout,
                                         std::array<bool, 4> wanted, bool causal, std::optional<double> scale) {
  if (!gradient.defined()) return {};
  AttentionGradients to{at::empty_like(q), at::empty_like(k), at::empty_like(v),
                        wanted[3] && bias.defined() ? at::empty_like(bias) : Tensor()};
  Attention a{q, k, v, bias, dropout, causal, scale_of(q, scale), seed_of(seed, dropout)};
  attend_backward("aten::_scaled_dot_product_efficient_attention_backward", a, gradient, output, sums, to);
  return {to.q, to.k, to.v, to.bias};
}

inline std::tuple<Tensor, Tensor, Tensor, Tensor, c10::SymInt, c10::SymInt, Tensor, Tensor, Tensor> flash_attention(
    const Tensor& q, const Tensor& k, const Tensor& v, double dropout, bool causal, bool,
    std::optional<double> scale) {
  Tensor output = empty_output(q, v.size(-1)), sums = empty_log_sums(q, q.size(2));
  uint64_t seed = dropout > 0 ? next_seed() : 0;
  Attention a{q, k, v, Tensor(), dropout, causal, scale_of(q, scale), seed};
  attend("aten::_scaled_dot_product_flash_attention", a, output, sums);
  return {output,    sums,         Tensor(),  Tensor(),
          q.size(2), k.size(2),    number(seed), number(0), at::empty({0}, q.options())};
}

inline std::tuple<Tensor, Tensor, Tensor> flash_attention_backward(
    const Tensor& gradient, const Tensor& q, const Tensor& k, const Tensor& v, const Tensor& output,
    const Tensor& sums, const Tensor&, const Tensor&, c10::SymInt, c10::SymInt, double dropout, bool causal,
    const Tensor& seed, const Tensor&, std::optional<double> scale) {
  if (!gradient.defined()) return {};
  AttentionGradients to{at::empty_like(q), at::empty_like(k), at::empty_like(v), Tensor()};
  Attention a{q, k, v, Tensor(), dropout, causal, scale_of(q, scale), seed_of(seed, dropout)};
  attend_backward("aten::_scaled_dot_product_flash_attention_backward", a, gradient, output, sums, to);
  return {to.q, to.k, to.v};
}

}  // namespace emulated
