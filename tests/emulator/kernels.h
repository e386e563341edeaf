// How is a kernel called that was found by its name? Its parameters' types say what lies where.
#pragma once
#include <tuple>
#include "block.h"

namespace emulator {

template <auto FUNCTION>
struct Bound;

template <class... A, void (*FUNCTION)(A...)>
struct Bound<FUNCTION> {
    template <std::size_t... I>
    static std::function<void()> bind(void** arguments, std::index_sequence<I...>) {
        std::tuple<std::remove_const_t<A>...> values(*static_cast<std::remove_const_t<A>*>(arguments[I])...);
        return [values] { std::apply(FUNCTION, values); };
    }
    static std::function<void()> bind(void** arguments) { return bind(arguments, std::index_sequence_for<A...>()); }
};

struct Registration {
    Registration(const char* name, Bind bind) { add_kernel(name, bind); }
};

}  // namespace emulator

#define KV_REGISTER(NAME) static emulator::Registration register_##NAME(#NAME, emulator::Bound<&NAME>::bind);
