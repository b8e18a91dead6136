//! Gradients through the facade: every backend of this machine, and what it does not have.

use proptest::prelude::*;
use tilewise::{
    Algorithm, BackwardInputs, Element, Engine, GradientJudge, Gradients, Options, TensorView,
};

use crate::support::{Case, Noise, case, cases, engines, unless_refused};

/// Training by these gradients: the example, as it stands.
#[path = "../examples/05_train/training.rs"]
mod training;

#[test]
fn a_model_learns_with_these_gradients() {
    let engine = Engine::named("cpu").unwrap();
    let (first, last) = training::train(&engine, 400).unwrap();
    // Guessing among 8 answers costs ln 8 = 2.08.
    assert!((1.7..2.6).contains(&first), "{first}");
    assert!(last < 0.1, "{last}");
}

fn equal_the_definition<T: Element>(
    case: &Case,
    algorithm: Algorithm,
) -> Result<(), TestCaseError> {
    let data = case.data::<T>();
    let inputs = data.inputs();
    for (name, engine) in engines() {
        let forward = engine.forward(&inputs, &data.options);
        let Some(forward) = unless_refused(&name, forward) else {
            continue;
        };
        let shape = case.dims().out_shape();
        let [b, h, s, _] = shape;
        let dout: Vec<T> = Noise(!case.seed).tensor(forward.out.len(), 1.0);
        let backward = BackwardInputs::new(
            inputs,
            TensorView::bhsd(&forward.out, shape).unwrap(),
            TensorView::bhsd(&forward.lse, [b, h, s, 1]).unwrap(),
            TensorView::bhsd(&dout, shape).unwrap(),
        );
        let problem = backward.problem(&data.options).unwrap();
        let judge = GradientJudge::new(&problem, &backward);
        let mut gradients = Gradients::filled(&problem, &inputs, f64::NAN).unwrap();
        let views = gradients.views_mut().unwrap();
        let made = engine.backward_into(algorithm, &backward, &data.options, views);
        if unless_refused(&name, made).is_none() {
            continue;
        }
        for comparison in judge.compare(&gradients.views_mut().unwrap()).unwrap() {
            prop_assert!(comparison.pass, "{name} {algorithm}: {comparison:?}");
        }
    }
    Ok(())
}

/// At most 12, whatever the environment asks for: on a GPU most of them are kernels to compile.
fn few() -> ProptestConfig {
    let mut config = cases(12);
    config.cases = config.cases.min(12);
    config
}

/// Causal problems or all others. Both are picked from the same stream of draws: where one seed serves every
/// test, these two still meet different problems.
fn problems<T: Element>(causal: bool) -> impl Strategy<Value = Case> {
    case(T::DTYPE).prop_filter("the other test's", move |case| {
        case.options.is_causal() == causal
    })
}

/// A test for each algorithm, of causal problems and of others: on a GPU kernels of different tests are
/// compiled side by side, those of one test one after another.
macro_rules! of_each_algorithm {
    ($t:ty) => {
        of_each_algorithm! { $t;
            standard Standard, false;
            standard_causal Standard, true;
            fa1 Fa1, false;
            fa1_causal Fa1, true;
            fa2 Fa2, false;
            fa2_causal Fa2, true;
        }
    };
    ($t:ty; $($name:ident $algorithm:ident, $causal:literal;)*) => {
        proptest! {
            #![proptest_config(few())]
            $(
                #[test]
                fn $name(case in problems::<$t>($causal)) {
                    equal_the_definition::<$t>(&case, Algorithm::$algorithm)?;
                }
            )*
        }
    };
}

mod f32_gradients_equal_the_definition {
    use super::*;

    of_each_algorithm!(f32);
}

mod bf16_gradients_equal_the_definition {
    use super::*;

    of_each_algorithm!(tilewise::half::bf16);
}

#[test]
fn gradients_that_do_not_fit_are_refused() {
    let engine = Engine::named("cpu").unwrap();
    let data = [0f32; 8];
    let view = TensorView::bhsd(&data, [1, 1, 2, 4]).unwrap();
    let lse = TensorView::bhsd(&data, [1, 1, 2, 1]).unwrap();
    let inputs = tilewise::Inputs::new(view, view, view);
    let short = view.narrow(2, 0..1);
    let wrong = BackwardInputs::new(inputs, view, lse, short);
    let error = engine.backward(&wrong, &Options::new()).unwrap_err();
    assert!(error.to_string().starts_with("dout"), "{error}");
    let right = BackwardInputs::new(inputs, view, lse, view);
    let problem = right.problem(&Options::new()).unwrap();
    let mut gradients = Gradients::filled(&problem, &inputs, 0.0).unwrap();
    let mut views = gradients.views_mut().unwrap();
    let mut sinks = [0f32];
    views.dsinks = Some(&mut sinks);
    let error = engine
        .backward_into(Algorithm::Auto, &right, &Options::new(), views)
        .unwrap_err();
    assert!(error.to_string().starts_with("dsinks"), "{error}");
}
