//! The run-time choice of a backend.

use tilewise::{BackendKind, Engine, Error, Inputs, Options, TensorView, backends, open};

#[test]
fn a_backend_asked_for_by_name_is_that_backend_or_an_error() {
    assert_eq!(Engine::named("cpu").unwrap().kind(), BackendKind::Cpu);
    let far = BackendKind::Cuda { ordinal: 4096 };
    match Engine::new(far).unwrap_err() {
        Error::Unavailable { backend, reason } => {
            assert_eq!(backend, "cuda:4096");
            assert!(!reason.is_empty());
        }
        other => panic!("{other}"),
    }
    assert!(
        Engine::named("tpu")
            .unwrap_err()
            .to_string()
            .contains("tpu")
    );
    assert!(open(BackendKind::Auto).is_err());
}

#[test]
fn the_list_gives_each_backend_or_the_reason_why_not() {
    let list = backends();
    assert!(
        list.iter()
            .any(|b| b.kind == BackendKind::Cpu && b.status.is_ok())
    );
    for backend in &list {
        match &backend.status {
            Ok(info) => assert_eq!(info.name, backend.kind.to_string()),
            Err(reason) => assert!(!reason.is_empty()),
        }
        assert_eq!(open(backend.kind).is_ok(), backend.status.is_ok());
    }
}

#[test]
fn auto_says_what_it_passed_over() {
    let data = [0.5f64; 64];
    let view = TensorView::bhsd(&data, [1, 2, 4, 8]).unwrap();
    let engine = Engine::new(BackendKind::Auto).unwrap();
    let attention = engine
        .forward(&Inputs::new(view, view, view), &Options::new())
        .unwrap();
    assert!(attention.out.iter().all(|&x| (x - 0.5).abs() < 1e-15));
    for kind in backends()
        .into_iter()
        .take_while(|b| b.kind != attention.info.backend)
    {
        assert!(
            attention
                .info
                .passed_over
                .iter()
                .any(|(k, reason)| *k == kind.kind && !reason.is_empty())
        );
    }
    let by_name = Engine::named("cpu").unwrap();
    let attention = by_name
        .forward(&Inputs::new(view, view, view), &Options::new())
        .unwrap();
    assert!(attention.info.passed_over.is_empty());
}
